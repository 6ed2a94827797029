"""Options of object stores. Only this module knows their names in pyarrow, deltalake and Hadoop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from urllib.parse import urlparse

from spark_abs.errors import UsageError


def _check_endpoint(name: str, url: str, allow_http: bool) -> None:
    try:
        scheme = urlparse(url).scheme
    except ValueError:
        scheme = ""
    if url and (scheme not in ("http", "https") or "@" in url):
        raise UsageError(f"the {name} of storage must be a URL such as https://HOST:PORT")
    if scheme == "http" and not allow_http:
        raise UsageError(f"the {name} {url} is not encrypted: use https, or set allowHttp=true")


def _given(options: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in options.items() if value}


@dataclass(frozen=True)
class S3:
    """How an S3-compatible store is reached. Empty options take the defaults of each library.

    Those are the usual variables `AWS_…` and, on a machine in the cloud, its own role.
    """

    endpoint: str = ""
    """URL of a store that is not Amazon's."""
    region: str = ""
    access_key_id: str = field(default="", repr=False)
    secret_access_key: str = field(default="", repr=False)
    session_token: str = field(default="", repr=False)
    allow_http: bool = False
    """Whether the endpoint may be reached without encryption."""

    def __post_init__(self) -> None:
        """Refuse options that do not fit together.

        Raises:
            UsageError: they do not.
        """
        if bool(self.access_key_id) != bool(self.secret_access_key):
            raise UsageError("storage has only one of accessKeyId and secretAccessKey: set both, or neither")
        if self.session_token and not self.access_key_id:
            raise UsageError(
                "storage has a sessionToken and no accessKeyId: set the keys that belong to the token"
            )
        _check_endpoint("endpoint", self.endpoint, self.allow_http)

    def delta(self) -> dict[str, str]:
        """Return the options by deltalake's names.

        A commit must never replace an existing one: the store refuses the second of two (If-None-Match).
        """
        return _given(
            {
                "AWS_ENDPOINT_URL": self.endpoint,
                "AWS_REGION": self.region,
                "AWS_ACCESS_KEY_ID": self.access_key_id,
                "AWS_SECRET_ACCESS_KEY": self.secret_access_key,
                "AWS_SESSION_TOKEN": self.session_token,
                "AWS_ALLOW_HTTP": "true" if self.allow_http else "",
                "AWS_CONDITIONAL_PUT": "etag",
            }
        )

    def hadoop(self) -> dict[str, str]:
        """Return the options by the names of Hadoop's S3A connector, for a session's configuration."""
        return _given(
            {
                "fs.s3a.endpoint": self.endpoint,
                "fs.s3a.endpoint.region": self.region,
                "fs.s3a.access.key": self.access_key_id,
                "fs.s3a.secret.key": self.secret_access_key,
                "fs.s3a.session.token": self.session_token,
                # Stores other than Amazon's seldom have a name in DNS for each bucket.
                "fs.s3a.path.style.access": "true" if self.endpoint else "",
            }
        )

    def arrow(self) -> dict[str, str]:
        """Return the options by the names of `pyarrow.fs.S3FileSystem`."""
        return _given(
            {
                "endpoint_override": self.endpoint,
                "region": self.region,
                "access_key": self.access_key_id,
                "secret_key": self.secret_access_key,
                "session_token": self.session_token,
            }
        )


@dataclass(frozen=True)
class Azure:
    """How Azure's storage is reached: by a key, a SAS token, a service principal, or the machine's role."""

    azure_account_key: str = field(default="", repr=False)
    azure_sas_token: str = field(default="", repr=False)
    azure_tenant_id: str = field(default="", repr=False)
    azure_client_id: str = field(default="", repr=False)
    azure_client_secret: str = field(default="", repr=False)
    azure_endpoint: str = ""
    """URL of an emulator, which has the name of the account in its paths."""
    allow_http: bool = False

    def __post_init__(self) -> None:
        """Refuse options that do not fit together.

        Raises:
            UsageError: they do not.
        """
        principal = (self.azure_tenant_id, self.azure_client_id, self.azure_client_secret)
        if any(principal) and not all(principal):
            raise UsageError(
                "storage has only a part of azureTenantId, azureClientId and azureClientSecret: "
                "set all three, or none"
            )
        if sum(map(bool, (self.azure_account_key, self.azure_sas_token, any(principal)))) > 1:
            raise UsageError(
                "storage has more than one credential for Azure: set azureAccountKey, azureSasToken or a "
                "service principal"
            )
        _check_endpoint("azureEndpoint", self.azure_endpoint, self.allow_http)

    def or_from(self, environ: Mapping[str, str]) -> Azure:
        """Return this, with the credential that the usual variables hold if none is given.

        Hadoop's connector does not know them, and pyarrow only those of a service principal.
        """
        if self.azure_account_key or self.azure_sas_token or self.azure_client_id:
            return self
        key, token, tenant, client, secret = (
            next((environ[name] for name in names if environ.get(name)), "") for names in _AZURE_VARIABLES
        )
        if key:
            return replace(self, azure_account_key=key)
        if token:
            return replace(self, azure_sas_token=token)
        if not (tenant and client and secret):
            return self  # an AZURE_CLIENT_ID alone chooses one of a machine's roles
        return replace(self, azure_tenant_id=tenant, azure_client_id=client, azure_client_secret=secret)

    def delta(self, account: str) -> dict[str, str]:
        """Return the options by deltalake's names; a commit is a PUT with If-None-Match."""
        return _given(
            {
                "AZURE_STORAGE_ACCOUNT_NAME": account,
                "AZURE_STORAGE_ACCOUNT_KEY": self.azure_account_key,
                "AZURE_STORAGE_SAS_KEY": self.azure_sas_token,
                "AZURE_STORAGE_TENANT_ID": self.azure_tenant_id,
                "AZURE_STORAGE_CLIENT_ID": self.azure_client_id,
                "AZURE_STORAGE_CLIENT_SECRET": self.azure_client_secret,
                "AZURE_STORAGE_ENDPOINT": f"{self.azure_endpoint.rstrip('/')}/{account}"
                if self.azure_endpoint
                else "",
                "AZURE_ALLOW_HTTP": "true" if self.allow_http else "",
            }
        )

    def hadoop(self) -> dict[str, str]:
        """Return the options by the names of Hadoop's ABFS connector, for a session's configuration."""
        found: dict[str, str] = {}
        if self.azure_account_key:
            found = {
                "fs.azure.account.auth.type": "SharedKey",
                "fs.azure.account.key": self.azure_account_key,
            }
        elif self.azure_sas_token:
            found = {
                "fs.azure.account.auth.type": "SAS",
                "fs.azure.sas.fixed.token": self.azure_sas_token,
            }
        elif self.azure_client_id:
            login = f"https://login.microsoftonline.com/{self.azure_tenant_id}/oauth2/token"
            found = {
                "fs.azure.account.auth.type": "OAuth",
                "fs.azure.account.oauth.provider.type": f"{_TOKENS_OF_AZURE}.ClientCredsTokenProvider",
                "fs.azure.account.oauth2.client.endpoint": login,
                "fs.azure.account.oauth2.client.id": self.azure_client_id,
                "fs.azure.account.oauth2.client.secret": self.azure_client_secret,
            }
        if self.azure_endpoint:
            # An emulator knows the blob API, without directories.
            found |= {
                "fs.azure.abfs.endpoint": urlparse(self.azure_endpoint).netloc,
                "fs.azure.account.hns.enabled": "false",
                "fs.azure.fns.account.service.type": "BLOB",
            }
        if urlparse(self.azure_endpoint).scheme == "http":
            found |= {
                "fs.azure.always.use.https": "false",
                "fs.azure.networking.library": "JDK_HTTP_URL_CONNECTION",
                "fs.abfss.impl": "org.apache.hadoop.fs.azurebfs.AzureBlobFileSystem",
            }
        return found

    def hadoop_defaults(self) -> dict[str, str]:
        """Return what a session is told that knows no credentials for Azure: to use the machine's role."""
        return {
            "fs.azure.account.auth.type": "OAuth",
            "fs.azure.account.oauth.provider.type": f"{_TOKENS_OF_AZURE}.MsiTokenProvider",
        }

    def arrow(self, account: str) -> dict[str, str]:
        """Return the options by the names of `pyarrow.fs.AzureFileSystem`."""
        emulator = urlparse(self.azure_endpoint)
        return _given(
            {
                "account_name": account,
                "account_key": self.azure_account_key,
                "sas_token": self.azure_sas_token,
                "tenant_id": self.azure_tenant_id,
                "client_id": self.azure_client_id,
                "client_secret": self.azure_client_secret,
                "blob_storage_authority": emulator.netloc,
                "blob_storage_scheme": emulator.scheme,
                "dfs_storage_authority": emulator.netloc,
                "dfs_storage_scheme": emulator.scheme,
            }
        )


_AZURE_VARIABLES = (
    ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_KEY"),
    ("AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_SAS_KEY"),
    ("AZURE_TENANT_ID",),
    ("AZURE_CLIENT_ID",),
    ("AZURE_CLIENT_SECRET",),
)
_TOKENS_OF_AZURE = "org.apache.hadoop.fs.azurebfs.oauth2"


@dataclass(frozen=True)
class Google:
    """How Google's storage is reached: by GOOGLE_APPLICATION_CREDENTIALS, or the machine's role.

    pyarrow takes no credentials that last in another way.
    """

    google_endpoint: str = ""
    """URL of an emulator."""
    allow_http: bool = False

    def __post_init__(self) -> None:
        """Refuse an endpoint that is none.

        Raises:
            UsageError: it is none.
        """
        _check_endpoint("googleEndpoint", self.google_endpoint, self.allow_http)

    def delta(self) -> dict[str, str]:
        """Return the options by deltalake's names; a commit is a PUT with x-goog-if-generation-match: 0."""
        return _given(
            {
                "GOOGLE_BASE_URL": self.google_endpoint,
                "ALLOW_HTTP": "true" if self.allow_http else "",
            }
        )

    def hadoop(self) -> dict[str, str]:
        """Return the options by the names of Hadoop's connector, for a session's configuration."""
        return _given({"fs.gs.storage.root.url": self.google_endpoint})

    def hadoop_defaults(self) -> dict[str, str]:
        """Return what a session is told that knows no credentials for Google: to find them as usual."""
        return {"fs.gs.auth.type": "APPLICATION_DEFAULT"}

    def arrow(self) -> dict[str, str]:
        """Return the options by the names of `pyarrow.fs.GcsFileSystem`."""
        emulator = urlparse(self.google_endpoint)
        return _given({"endpoint_override": emulator.netloc, "scheme": emulator.scheme})

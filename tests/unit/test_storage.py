"""Options of storage are given once and translated for each library; locations have one form."""

from __future__ import annotations

import os
import pickle
import re
from base64 import b64encode
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_abs.errors import ConfigError, DamageError, UsageError
from spark_abs.model import is_number
from spark_abs.settings import Settings
from spark_abs.store.options import S3, Azure, Google
from spark_abs.store.root import Root
from spark_abs.store.storage import (
    DATABRICKS,
    DEFAULTS,
    Place,
    Storage,
    location_of,
    root_location,
    table_location,
    told,
)

OF_S3 = S3("http://127.0.0.1:9000", "eu-west-1", "who", "SeCrEt", "ToKeN", True)
FULL = Storage(OF_S3, Azure(allow_http=True), Google(allow_http=True))
IN_AZURE = "abfss://box@account.dfs.core.windows.net/a/b"


@pytest.fixture(autouse=True)
def nothing_of_azure_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)


def test_options_have_the_names_of_every_library() -> None:
    assert OF_S3.delta() == {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9000",
        "AWS_REGION": "eu-west-1",
        "AWS_ACCESS_KEY_ID": "who",
        "AWS_SECRET_ACCESS_KEY": "SeCrEt",
        "AWS_SESSION_TOKEN": "ToKeN",
        "AWS_ALLOW_HTTP": "true",
        "AWS_CONDITIONAL_PUT": "etag",
    }
    assert OF_S3.hadoop() == {
        "fs.s3a.endpoint": "http://127.0.0.1:9000",
        "fs.s3a.endpoint.region": "eu-west-1",
        "fs.s3a.access.key": "who",
        "fs.s3a.secret.key": "SeCrEt",
        "fs.s3a.session.token": "ToKeN",
        "fs.s3a.path.style.access": "true",
    }
    assert OF_S3.arrow() == {
        "endpoint_override": "http://127.0.0.1:9000",
        "region": "eu-west-1",
        "access_key": "who",
        "secret_key": "SeCrEt",
        "session_token": "ToKeN",
    }


def test_an_error_of_a_store_is_told_in_one_line_with_its_causes() -> None:
    said = (
        "Kernel error -> Generic S3 error\n  \x1b[31m\u21b3\x1b[0m Error performing list request\n"
        "    \x1b[31m\u21b3\x1b[0m 404 Not Found\n<Error><Code>NoSuchBucket</Code>\n</Error>\n\n"
    )
    assert told(OSError(said)) == (
        "Kernel error -> Generic S3 error: Error performing list request: 404 Not Found "
        "<Error><Code>NoSuchBucket</Code> </Error>"
    )
    assert told(OSError("x" * 2000)) == "x" * 800 + "..."


def test_a_file_is_moved_in_place_of_another(tmp_path: Path) -> None:
    place = Place(str(tmp_path / "a b"))
    place.write("one/x", b"1")
    place.write("y", b"2")
    place.move("one/x", "two/three/x")
    place.move("y", "two/three/x")
    assert (place.read("two/three/x"), place.read("one/x"), place.read("y")) == (b"2", None, None)
    with pytest.raises(OSError, match="y"):
        place.move("y", "z")


def test_what_is_not_given_is_left_to_each_library() -> None:
    assert (DEFAULTS.hadoop(), S3().arrow(), Google().arrow()) == ({}, {}, {})
    assert Place("s3://bucket/x").options == {"AWS_CONDITIONAL_PUT": "etag"}
    assert Place(IN_AZURE).options == {"AZURE_STORAGE_ACCOUNT_NAME": "account"}
    assert Place("gs://bucket/x").options == {}
    assert Place("/x", FULL).options is None


def test_a_session_is_told_of_the_kinds_of_stores_that_it_must_reach() -> None:
    azure = {
        "fs.azure.account.auth.type": "OAuth",
        "fs.azure.account.oauth.provider.type": "org.apache.hadoop.fs.azurebfs.oauth2.MsiTokenProvider",
    }
    google = {"fs.gs.auth.type": "APPLICATION_DEFAULT"}
    assert DEFAULTS.hadoop_defaults(["/x", "s3a://bucket/x"]) == ()
    assert DEFAULTS.hadoop_defaults([IN_AZURE]) == (azure,)
    assert DEFAULTS.hadoop_defaults(["/x", "gs://bucket/x"]) == (google,)
    assert DEFAULTS.hadoop_defaults(iter(["gs://bucket/x", IN_AZURE])) == (azure, google)


@pytest.mark.parametrize(
    ("azure", "delta", "hadoop", "arrow"),
    [
        (
            Azure("SeCrEt"),
            {"AZURE_STORAGE_ACCOUNT_KEY": "SeCrEt"},
            {"fs.azure.account.auth.type": "SharedKey", "fs.azure.account.key": "SeCrEt"},
            {"account_key": "SeCrEt"},
        ),
        (
            Azure(azure_sas_token="SeCrEt"),
            {"AZURE_STORAGE_SAS_KEY": "SeCrEt"},
            {"fs.azure.account.auth.type": "SAS", "fs.azure.sas.fixed.token": "SeCrEt"},
            {"sas_token": "SeCrEt"},
        ),
        (
            Azure("", "", "tenant", "id", "SeCrEt"),
            {
                "AZURE_STORAGE_TENANT_ID": "tenant",
                "AZURE_STORAGE_CLIENT_ID": "id",
                "AZURE_STORAGE_CLIENT_SECRET": "SeCrEt",
            },
            {
                "fs.azure.account.auth.type": "OAuth",
                "fs.azure.account.oauth.provider.type": (
                    "org.apache.hadoop.fs.azurebfs.oauth2.ClientCredsTokenProvider"
                ),
                "fs.azure.account.oauth2.client.endpoint": (
                    "https://login.microsoftonline.com/tenant/oauth2/token"
                ),
                "fs.azure.account.oauth2.client.id": "id",
                "fs.azure.account.oauth2.client.secret": "SeCrEt",
            },
            {"tenant_id": "tenant", "client_id": "id", "client_secret": "SeCrEt"},
        ),
        (
            Azure(azure_endpoint="http://127.0.0.1:10000", allow_http=True),
            {
                "AZURE_STORAGE_ENDPOINT": "http://127.0.0.1:10000/account",
                "AZURE_ALLOW_HTTP": "true",
            },
            {
                "fs.azure.abfs.endpoint": "127.0.0.1:10000",
                "fs.azure.account.hns.enabled": "false",
                "fs.azure.fns.account.service.type": "BLOB",
                "fs.azure.always.use.https": "false",
                "fs.azure.networking.library": "JDK_HTTP_URL_CONNECTION",
                "fs.abfss.impl": "org.apache.hadoop.fs.azurebfs.AzureBlobFileSystem",
            },
            {
                "blob_storage_authority": "127.0.0.1:10000",
                "blob_storage_scheme": "http",
                "dfs_storage_authority": "127.0.0.1:10000",
                "dfs_storage_scheme": "http",
            },
        ),
    ],
    ids=["key", "sas", "principal", "emulator"],
)
def test_options_of_azure(
    azure: Azure, delta: dict[str, str], hadoop: dict[str, str], arrow: dict[str, str]
) -> None:
    assert Place(IN_AZURE, Storage(azure=azure)).options == {"AZURE_STORAGE_ACCOUNT_NAME": "account", **delta}
    assert azure.hadoop() == hadoop
    assert azure.arrow("account") == {"account_name": "account", **arrow}
    assert "SeCrEt" not in repr(azure)


def test_options_of_google() -> None:
    google = Google("http://127.0.0.1:4443", allow_http=True)
    assert google.delta() == {"GOOGLE_BASE_URL": "http://127.0.0.1:4443", "ALLOW_HTTP": "true"}
    assert google.hadoop() == {"fs.gs.storage.root.url": "http://127.0.0.1:4443"}
    assert google.arrow() == {"endpoint_override": "127.0.0.1:4443", "scheme": "http"}


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({"AZURE_STORAGE_ACCOUNT_KEY": "k", "AZURE_CLIENT_ID": "i"}, Azure("k")),
        ({"AZURE_STORAGE_KEY": "k"}, Azure("k")),
        ({"AZURE_STORAGE_SAS_TOKEN": "s"}, Azure(azure_sas_token="s")),
        (
            {"AZURE_TENANT_ID": "t", "AZURE_CLIENT_ID": "i", "AZURE_CLIENT_SECRET": "s"},
            Azure("", "", "t", "i", "s"),
        ),
        ({"AZURE_CLIENT_ID": "one of the machine's roles"}, Azure()),
        ({}, Azure()),
    ],
)
def test_the_usual_variables_of_azure_reach_every_library(
    variables: dict[str, str], found: Azure, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert Storage.given().azure == found
    assert Storage.given(arguments={"azure_sas_token": "given"}).azure == Azure(azure_sas_token="given")


def test_settings_of_every_source_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_ABS_STORAGE_ACCESS_KEY_ID", "who")
    monkeypatch.setenv("SPARK_ABS_STORAGE_REGION", "nowhere")
    conf = {"spark.abs.storage.secretAccessKey": "SeCrEt", "spark.abs.storage.region": "eu-west-1"}
    arguments = {"endpoint": OF_S3.endpoint, "allow_http": True, "session_token": "ToKeN"}
    assert Storage.given(conf, arguments) == FULL
    yaml = {"storage": {"endpoint": "https://store.example"}}
    assert Storage.of(Settings.resolve(yaml, {}, {}, {})).s3.endpoint == "https://store.example"


def test_a_setting_that_is_not_about_storage_is_refused_and_not_ignored() -> None:
    with pytest.raises(ConfigError, match="'interval' is no setting of storage"):
        Storage.given(arguments={"interval": "1s"})


@pytest.mark.parametrize("name", ["accessKeyId", "secretAccessKey", "sessionToken"])
def test_an_error_about_a_secret_does_not_show_it(name: str) -> None:
    with pytest.raises(ConfigError, match=f"storage.{name} .YAML.: expected text") as raised:
        Settings.resolve({"storage": {name: 4711}}, {}, {}, {})
    assert "4711" not in str(raised.value)


def test_no_secret_is_shown() -> None:
    settings = Settings.resolve({}, {}, {}, {"access_key_id": "WhO", "secret_access_key": "SeCrEt"})
    storage = Storage(S3("", "", "WhO", "SeCrEt", "ToKeN"))
    root = Root("s3://bucket/x", storage)
    for shown in (settings, storage, root, root.place("y"), f"{root.place('y')}"):
        assert not {word for word in ("WhO", "SeCrEt", "ToKeN") if word in f"{shown!r} {shown}"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"access_key_id": "who"}, "only one of accessKeyId and secretAccessKey"),
        ({"secret_access_key": "SeCrEt"}, "only one of accessKeyId and secretAccessKey"),
        ({"session_token": "ToKeN"}, "and no accessKeyId"),
        ({"endpoint": "127.0.0.1:9000"}, "must be a URL"),
        ({"endpoint": "https://who:SeCrEt@host"}, "must be a URL"),
        ({"endpoint": "https://SeCrEt]"}, "must be a URL"),
        ({"endpoint": "http://host"}, "set allowHttp=true"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        Storage.given(arguments=options)
    assert "SeCrEt" not in str(raised.value)


@pytest.mark.parametrize("uri", ["s3://bucket/a/b", "s3a://bucket/a/b/", "s3a://bucket/a/b"])
def test_an_object_store_has_one_name(uri: str) -> None:
    assert location_of(uri) == "s3a://bucket/a/b"
    assert Root(uri) == Root("s3a://bucket/a/b")


@pytest.mark.parametrize("uri", [IN_AZURE, "gs://bucket/a/b"])
def test_a_location_of_azure_and_google_stays_itself(uri: str) -> None:
    assert location_of(uri) == location_of(f"{uri}/") == root_location(uri) == table_location(uri) == uri


@pytest.mark.parametrize(
    "uri",
    [
        "s3://who:SeCrEt@bucket/a",
        "s3://bucket/a?secret_key=SeCrEt",
        "s3://bucket/a#SeCrEt",
        "s3:///SeCrEt",
        f"{IN_AZURE}?sig=SeCrEt",
        "abfss://who:SeCrEt@account.dfs.core.windows.net/a",
        "abfss://box@account.blob.core.windows.net/SeCrEt",
        "abfss://account/SeCrEt",
        "gs://who:SeCrEt@bucket/a",
        "gs://bucket/a?SeCrEt",
    ],
)
def test_a_location_is_no_place_for_credentials(uri: str) -> None:
    with pytest.raises(UsageError, match=r", without credentials or options: these are settings") as raised:
        location_of(uri)
    assert "SeCrEt" not in str(raised.value)


@pytest.mark.parametrize(
    ("uri", "form"),
    [
        ("az://box/a?SeCrEt", "abfss://CONTAINER@ACCOUNT"),
        ("abfs://box@account.dfs.core.windows.net/a", "abfss://CONTAINER@ACCOUNT"),
        ("wasbs://box@account.blob.core.windows.net/a", "abfss://CONTAINER@ACCOUNT"),
        ("adl://account/a", "abfss://CONTAINER@ACCOUNT"),
        ("gcs://bucket/a", "gs://BUCKET/PATH"),
        ("s3n://bucket/a", "s3://BUCKET/PATH"),
    ],
)
def test_another_scheme_of_a_store_is_refused_with_the_form_that_works(uri: str, form: str) -> None:
    with pytest.raises(UsageError, match=f"not every library knows it: write {form}") as raised:
        location_of(uri)
    assert "SeCrEt" not in str(raised.value)


def test_a_location_that_cannot_be_read_is_refused_and_not_shown() -> None:
    with pytest.raises(UsageError, match="must be a path, or a URL such as") as raised:
        location_of("s3://SeCrEt]/a")
    assert "SeCrEt" not in str(raised.value)


def test_a_root_is_where_every_library_reaches_it() -> None:
    for uri in ("s3://bucket/a", "s3a://bucket/a", "/a", "file:///a", "a/b", "./dta:x"):
        assert root_location(uri) == location_of(uri)
    for uri in ("dta:x", "hdfs://name/a"):
        with pytest.raises(UsageError, match=r"cannot be in [a-z]+: give a path .*s3://BUCKET/PATH"):
            root_location(uri)


@pytest.mark.parametrize("part", ["[", "]", "^", "|", "\\", "\n", "%41"])
def test_a_root_is_not_where_deltalake_finds_no_table(part: str) -> None:
    with pytest.raises(UsageError, match="give another directory") as raised:
        root_location(f"/data/a{part}b/root")
    assert "\n" not in str(raised.value)
    assert root_location("/data/a b%zz#ä*?/root") == "/data/a b%zz#ä*?/root"


def test_a_file_that_is_not_text_is_damage(tmp_path: Path) -> None:
    place = DEFAULTS.place(str(tmp_path))
    place.write("a", b"caf\xe9")
    with pytest.raises(DamageError, match=re.escape(f"{place}/a is not text")):
        place.read_text("a")
    assert place.read_text("b") is None


@pytest.mark.parametrize("text", ["\N{SUPERSCRIPT TWO}", "\N{ARABIC-INDIC DIGIT THREE}", "1.5", "-1", ""])
def test_only_ascii_digits_are_the_number_of_a_file(text: str) -> None:
    assert not is_number(text)
    assert is_number("017")


def test_neither_a_root_nor_a_table_is_in_a_file_system_of_databricks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They have no atomic create. Elsewhere a directory may have any name."""
    mounts = ("/Volumes/main/default/v/root", "file:///dbfs/root")
    assert [root_location(uri) for uri in mounts] == [location_of(uri) for uri in mounts]
    monkeypatch.setenv(DATABRICKS, "17.3")
    for uri in ("dbfs:/root", *mounts):
        with pytest.raises(UsageError, match=r"cannot create a file only where .*s3://BUCKET/PATH"):
            root_location(uri)
        with pytest.raises(UsageError, match=r"cannot create a file only where .*s3://BUCKET/PATH"):
            table_location(uri)
    with pytest.raises(UsageError, match=r"looks for such a path in dbfs:, .*s3://BUCKET/PATH"):
        root_location("/tmp/root")
    assert root_location("s3://bucket/a") == "s3a://bucket/a"


@given(st.text("abc/", min_size=1, max_size=12))
def test_a_local_location_is_absolute_and_stays_itself(path: str) -> None:
    location = location_of(path)
    assert os.path.isabs(location)
    assert location_of(location) == location == location_of(f"file://{location}")


def test_a_place_travels_with_its_storage() -> None:
    place = pickle.loads(pickle.dumps(Place("s3://bucket/a", FULL).below("b")))
    assert (place.uri, place.storage, place.path) == ("s3a://bucket/a/b", FULL, "bucket/a/b")
    root = pickle.loads(pickle.dumps(Root("s3://bucket/a", FULL)))
    assert root.place("b") == place


def test_all_places_of_a_bucket_share_one_client() -> None:
    assert Place("s3://bucket/a", FULL).fs is Place("s3a://bucket/b", FULL).fs
    assert Place("s3://bucket/a", FULL).fs is not Place("s3://other/a", FULL).fs
    key = Storage(azure=Azure(b64encode(b"key").decode()))
    assert Place(IN_AZURE, key).path == "box/a/b"
    assert Place(IN_AZURE, key).fs is Place(IN_AZURE.replace("box", "other"), key).fs
    assert Place("gs://bucket/a").fs is Place("gs://other/a").fs


def test_small_files(tmp_path: Path) -> None:
    place = Place(str(tmp_path / "a b"))
    assert not place.exists()
    assert place.read("c/d") is None
    place.write("c/d", b"1")
    place.write("c/d", b"2")
    assert (place.read("c/d"), place.below("c/d").exists(), place.local) == (b"2", True, True)
    assert [p.name for p in (tmp_path / "a b" / "c").iterdir()] == ["d"]
    assert place.in_spark_files == f"file:{tmp_path}/a%20b"
    assert Place("s3://bucket/a b").in_spark_files == "s3a://bucket/a%20b"
    assert Place(f"{IN_AZURE} c").in_spark_files == f"{IN_AZURE}%20c"

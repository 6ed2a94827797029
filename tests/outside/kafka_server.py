"""A Kafka broker of the tests' own: one node, on free ports, in a temporary directory."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    NewPartitions,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)

from spark_abs.spark.session import spark_session
from spark_abs.spark.versions import KAFKA_CONNECTOR
from tests.ports import free_port

PACKAGE = "kafka_2.13"
VERSION = "4.1.0"
PATIENCE_S = 60
_CLUSTER = "c3BhcmstYWJzLXRlc3RzLQ"
_JAVA = ("-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Djava.net.preferIPv4Stack=true")
_CACHE = Path.home() / ".ivy2.5.2" / "cache"


class KafkaServer:
    """Ends with the test; `stop`, `start` and `restart` in between. Keeps its records over them."""

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        self._classpath = classpath()
        self._directory = Path(tempfile.mkdtemp(prefix="spark-abs-kafka-"))
        self.port, controller = free_port(), free_port()
        listeners = f"PLAINTEXT://127.0.0.1:{self.port},CONTROLLER://127.0.0.1:{controller}"
        told: dict[str, str] = {
            "node.id": "1",
            "process.roles": "broker,controller",
            "listeners": listeners,
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{self.port}",
            "controller.listener.names": "CONTROLLER",
            "controller.quorum.voters": f"1@127.0.0.1:{controller}",
            "log.dirs": str(self._directory / "data"),
            "num.partitions": "2",
            "auto.create.topics.enable": "false",
            "offsets.topic.replication.factor": "1",
            "offsets.topic.num.partitions": "1",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "transaction.state.log.num.partitions": "1",
            "group.initial.rebalance.delay.ms": "0",
            "log.cleaner.dedupe.buffer.size": "2097152",
            **(settings or {}),
        }
        self._properties = self._directory / "server.properties"
        self._properties.write_text("".join(f"{name}={value}\n" for name, value in told.items()))
        self._process: subprocess.Popen[bytes] | None = None
        made = subprocess.run(
            self._java("kafka.tools.StorageTool", "format", "-t", _CLUSTER, "-c", str(self._properties)),
            capture_output=True,
            text=True,
        )
        assert made.returncode == 0, made.stdout + made.stderr
        self.start()

    def __enter__(self) -> KafkaServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def bootstrap(self) -> str:
        """Where clients find it."""
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        with (self._directory / "log").open("ab") as output:
            self._process = subprocess.Popen(
                self._java("kafka.Kafka", str(self._properties)),
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self._directory,
            )
        pause = threading.Event()
        for _ in range(PATIENCE_S * 5):
            assert self._process.poll() is None, (self._directory / "log").read_text()
            try:
                if self.admin().list_topics(timeout=1).brokers:
                    return
            except KafkaException:
                pause.wait(0.1)
        raise TimeoutError((self._directory / "log").read_text())

    def stop(self, how: signal.Signals = signal.SIGKILL) -> None:
        """End it; SIGKILL is a crash, SIGTERM an orderly end."""
        assert self._process is not None
        self._process.send_signal(how)
        self._process.wait(PATIENCE_S)

    def restart(self) -> None:
        self.stop()
        self.start()

    @contextmanager
    def frozen(self) -> Any:
        """Let it stand still for a while: connections stay, nothing answers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def admin(self) -> AdminClient:
        return AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0})

    def make(self, topic: str, partitions: int = 2, **config: str) -> None:
        """Make a topic."""
        named = {name.replace("_", "."): value for name, value in config.items()}
        admin = self.admin()
        admin.create_topics([NewTopic(topic, partitions, 1, config=named)])[topic].result(PATIENCE_S)

    def grow(self, topic: str, partitions: int) -> None:
        """Give a topic more partitions."""
        admin = self.admin()
        admin.create_partitions([NewPartitions(topic, partitions)])[topic].result(PATIENCE_S)

    def deny(self, kind: ResourceType, name: str, what: AclOperation) -> None:
        """Let nobody do something, and everybody all else; the broker needs an authorizer."""
        rules = [
            AclBinding(kind, name, ResourcePatternType.LITERAL, "User:*", "*", operation, permission)
            for operation, permission in (
                (AclOperation.ALL, AclPermissionType.ALLOW),
                (what, AclPermissionType.DENY),
            )
        ]
        admin = self.admin()
        for made in admin.create_acls(rules).values():
            made.result(PATIENCE_S)

    def drop(self, topic: str) -> None:
        """Delete a topic."""
        admin = self.admin()
        admin.delete_topics([topic])[topic].result(PATIENCE_S)

    def topics(self) -> list[str]:
        return sorted(self.admin().list_topics(timeout=PATIENCE_S).topics)

    def read(self, topic: str, *, committed: bool = True) -> list[Message]:
        """Read all that is in a topic now, partition by partition; what was committed, or everything."""
        with Reader(self, topic, committed=committed) as reader:
            return reader.read()

    def _java(self, main: str, *arguments: str) -> list[str]:
        home = os.environ.get("JAVA_HOME")
        java = str(Path(home) / "bin" / "java") if home else "java"
        return [java, *_JAVA, "-cp", os.pathsep.join(self._classpath), main, *arguments]


class Reader:
    """Reads a topic to its end, each time what has come since."""

    def __init__(self, server: KafkaServer, topic: str, *, committed: bool = True) -> None:
        self._consumer = Consumer(
            {
                "bootstrap.servers": server.bootstrap,
                "group.id": "tests",
                "enable.auto.commit": False,
                "isolation.level": "read_committed" if committed else "read_uncommitted",
                "enable.partition.eof": True,
                "auto.offset.reset": "earliest",  # records before it may be deleted
                "fetch.wait.max.ms": 10,
                "log_level": 0,
            }
        )
        found = self._consumer.list_topics(topic, timeout=PATIENCE_S).topics[topic].partitions
        self._next = {TopicPartition(topic, number).partition: 0 for number in found}
        self._topic = topic

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._consumer.close()

    def read(self) -> list[Message]:
        """Return what has come since the last call, up to the first transaction that is open."""
        return [message for some in self.pieces() for message in some]

    def pieces(self) -> Iterator[list[Message]]:
        """Iterate what `read` returns, in pieces."""
        for partition, at in self._next.items():
            self._consumer.assign([TopicPartition(self._topic, partition, at)])
            until = -1
            while until < 0:
                found: list[Message] = []
                for message in self._consumer.consume(1000, 0.02):
                    error = message.error()
                    if error is None:
                        found.append(message)
                    else:
                        assert error.code() == KafkaError._PARTITION_EOF, error
                        until = message.offset() or 0
                yield found
            self._next[partition] = until

    @property
    def at_end(self) -> bool:
        """Whether nothing is behind what was read: a commit has an answer before each partition has it."""
        ends = (self._consumer.get_watermark_offsets(TopicPartition(self._topic, p))[1] for p in self._next)
        return list(ends) == list(self._next.values())


def classpath() -> list[str]:
    """Find the broker's jars, fetched through Ivy the first time, as Spark fetches its packages."""
    kept = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spark_abs"
    listed = kept / f"{PACKAGE}-{VERSION}.classpath"
    jars = listed.read_text().strip().split(os.pathsep) if listed.exists() else []
    if jars and all(Path(jar).exists() for jar in jars):
        return jars
    spec = find_spec("pyspark")
    assert spec is not None
    assert spec.origin is not None
    spark = Path(spec.origin).parent / "jars"
    ivy = os.pathsep.join(map(str, [*spark.glob("ivy-*.jar"), *spark.glob("commons-cli-*.jar")]))
    kept.mkdir(parents=True, exist_ok=True)
    new = listed.with_name(f".{listed.name}.{os.getpid()}")
    fetch = [
        *("java", "-cp", ivy, "org.apache.ivy.Main", "-cache", str(_CACHE), "-confs", "default"),
        *("-dependency", "org.apache.kafka", PACKAGE, VERSION, "-cachepath", str(new)),
    ]
    done = subprocess.run(fetch, capture_output=True, text=True)
    jars = new.read_text().strip().split(os.pathsep) if new.exists() else []
    assert any(PACKAGE in jar for jar in jars), (
        f"no broker: org.apache.kafka:{PACKAGE}:{VERSION} could not be fetched; Maven Central must be "
        f"reachable once\n{done.stdout[-2000:]}"
    )
    new.replace(listed)
    return jars


def texts(messages: Iterable[Message]) -> list[str]:
    """The values, as text."""
    return [(message.value() or b"").decode() for message in messages]


def main() -> None:
    """Fetch the broker, and the connector that the tests' sessions have."""
    classpath()
    spark_session("set-up", "local[1]", packages=[KAFKA_CONNECTOR]).stop()


if __name__ == "__main__":
    main()

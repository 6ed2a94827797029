"""The public names, in the only list of them: type checkers read it, and `__init__.py` loads from it."""

from spark_abs.errors import AbsError as AbsError
from spark_abs.errors import AttemptNotReady as AttemptNotReady
from spark_abs.errors import CheckpointNotFound as CheckpointNotFound
from spark_abs.errors import CheckpointPending as CheckpointPending
from spark_abs.errors import CheckpointsFailed as CheckpointsFailed
from spark_abs.errors import CommitConflict as CommitConflict
from spark_abs.errors import CommitStateUnknown as CommitStateUnknown
from spark_abs.errors import ConfigError as ConfigError
from spark_abs.errors import DamageError as DamageError
from spark_abs.errors import Fenced as Fenced
from spark_abs.errors import GraphError as GraphError
from spark_abs.errors import Refused as Refused
from spark_abs.errors import RootNotFound as RootNotFound
from spark_abs.errors import RunAlive as RunAlive
from spark_abs.errors import SinkFailed as SinkFailed
from spark_abs.errors import SinkUnreachable as SinkUnreachable
from spark_abs.errors import SparkNotStarted as SparkNotStarted
from spark_abs.errors import StageFailed as StageFailed
from spark_abs.errors import StateFunctionFailed as StateFunctionFailed
from spark_abs.errors import StoreFailed as StoreFailed
from spark_abs.errors import UsageError as UsageError
from spark_abs.job import Job as Job
from spark_abs.job_root import JobRoot as JobRoot
from spark_abs.job_root import open as open  # noqa: A004
from spark_abs.plan.specs import Output as Output
from spark_abs.plan.specs import Stage as Stage
from spark_abs.protocol.outside import Epoch as Epoch
from spark_abs.protocol.outside import Mark as Mark
from spark_abs.protocol.outside import Owner as Owner
from spark_abs.restore.edit import Edit as Edit
from spark_abs.run.run import Run as Run
from spark_abs.sinks.delta.options import Delta as Delta
from spark_abs.sinks.iceberg.config import Iceberg as Iceberg
from spark_abs.sinks.kafka.config import Kafka as Kafka
from spark_abs.sinks.postgres.config import Postgres as Postgres
from spark_abs.sinks.two_phase import Rows as Rows
from spark_abs.sinks.two_phase import TwoPhaseSink as TwoPhaseSink
from spark_abs.spark.session import configure as configure
from spark_abs.spark.session import spark_session as spark_session
from spark_abs.spark.versions import AZURE_CONNECTOR as AZURE_CONNECTOR
from spark_abs.spark.versions import DELTA_CONNECTOR as DELTA_CONNECTOR
from spark_abs.spark.versions import GOOGLE_CONNECTOR as GOOGLE_CONNECTOR
from spark_abs.spark.versions import KAFKA_CONNECTOR as KAFKA_CONNECTOR
from spark_abs.spark.versions import S3_CONNECTOR as S3_CONNECTOR
from spark_abs.stages.batch import Current as Current
from spark_abs.stages.batch import current as current
from spark_abs.state.batches import GroupAnswer as GroupAnswer
from spark_abs.state.batches import GroupBatch as GroupBatch
from spark_abs.state.functions import flat_map_groups_with_state as flat_map_groups_with_state
from spark_abs.state.functions import map_batches_with_state as map_batches_with_state
from spark_abs.state.functions import map_groups_with_state as map_groups_with_state
from spark_abs.state.per_key import GroupState as GroupState
from spark_abs.wrapped.foreach_batch import foreach_batch as foreach_batch
from spark_abs.wrapped.location import checkpoint_location as checkpoint_location

__all__: list[str]

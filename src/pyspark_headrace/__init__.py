"""What Spark finds by itself: it looks for modules named `pyspark_*` with a `DefaultSource`.

Owns nothing but the way from Spark's names to the readers and writers of `headrace.pipeline`.
"""

import gc
import os
from collections.abc import MutableMapping

import pyspark

try:
    from pyspark.sql.datasource import (
        DataSource,
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructType

    from headrace.pipeline.options import OptionError, parse_source_options
    from headrace.pipeline.sink import BatchWriter, StreamWriter, parse_sink_options
    from headrace.pipeline.source import (
        SCHEMA,
        SCHEMA_WITH_HEADERS,
        BatchReader,
        FilteringBatchReader,
        StreamReader,
    )
except ImportError as error:
    raise ImportError(
        f"headrace needs pyspark 4.2 or newer and pyarrow, this is pyspark {pyspark.__version__}: {error}. "
        "pip install 'headrace[spark]' has what fits."
    ) from error

if os.environ.get("SPARK_PYTHON_RUNTIME") == "PYTHON_WORKER":
    # A worker of Spark collects garbage after every task, and looks at all that was ever loaded: tens of milliseconds,
    # several times in a micro-batch. What is loaded by now stays for good, so there is no need to look at it.
    gc.collect()
    gc.freeze()


class DefaultSource(DataSource):
    """`format("headrace")`: topics of Headrace or Kafka as tables and streams."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        self.options = dict(options)

    @classmethod
    def name(cls) -> str:
        return "headrace"

    def schema(self) -> str:
        given = {name.lower(): value for name, value in self.options.items()}
        return SCHEMA_WITH_HEADERS if given.get("includeheaders", "").lower() == "true" else SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        options = parse_source_options(self.options, streaming=False)
        return (
            FilteringBatchReader(options, schema) if options.filter_pushdown else BatchReader(options, schema)
        )

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 (Spark's name)
        return StreamReader(parse_source_options(self.options, streaming=True), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        if overwrite:
            raise OptionError(
                "Save mode overwrite is not allowed for Kafka: a topic can only be appended to."
            )
        return BatchWriter(parse_sink_options(self.options, streaming=False), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802 (Spark's name)
        return StreamWriter(parse_sink_options(self.options, streaming=True), schema)

"""Orders from a topic, those above a limit into another topic, each once."""

import os

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

BROKERS = {"kafka.bootstrap.servers": os.environ["HEADRACE_BOOTSTRAP"]}
SCHEMA = "id bigint, customer string, amount double"
spark = SparkSession.active()

dp.create_sink("large", "headrace", {**BROKERS, "topic": "large-orders"})


@dp.temporary_view
def orders() -> DataFrame:
    read = spark.readStream.format("headrace").options(
        **BROKERS, subscribe="orders", startingOffsets="earliest"
    )
    return read.load().select(F.from_json(F.col("value").cast("string"), SCHEMA).alias("o")).select("o.*")


@dp.append_flow(target="large")
def large_orders() -> DataFrame:
    large = spark.readStream.table("orders").where("amount >= 100")
    return large.select(F.col("customer").alias("key"), F.to_json(F.struct("id", "amount")).alias("value"))

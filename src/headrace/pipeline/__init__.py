"""The data pipeline on Spark: source, exactly-once sink, and pipelines declared in a file."""

"""The options of the Spark source and sink: what is taken, what is refused, and in which words."""

import pytest

from headrace.pipeline.options import OptionError, parse_duration_ms, parse_source_options

BASE = {"kafka.bootstrap.servers": "h:9092"}


def refused(options: dict[str, str], *, streaming: bool = True) -> str:
    with pytest.raises(OptionError) as error:
        parse_source_options({**BASE, **options}, streaming=streaming)
    return str(error.value)


def test_a_stream_begins_at_the_end_and_a_batch_at_the_beginning() -> None:
    options = {**BASE, "subscribe": "a, b"}
    stream, batch = (parse_source_options(options, streaming=s) for s in (True, False))
    assert (stream.starting, batch.starting, batch.ending) == ("latest", "earliest", "latest")
    assert stream.topics == ["a", "b"]
    assert stream.on_data_loss == "fail"
    assert stream.consumer == {"bootstrap.servers": "h:9092"}


@pytest.mark.parametrize(
    ("options", "streaming", "words"),
    [
        ({}, True, "One of the following options must be specified"),
        ({"subscribe": "a", "assign": "{}"}, True, "Only one of the following"),
        ({"subscribe": " "}, True, "is empty"),
        ({"subscribe": "a", "startingOfsets": "earliest"}, True, "Did you mean 'startingOffsets'?"),
        ({"subscribe": "a", "endingOffsets": "latest"}, True, "not supported in streaming"),
        ({"subscribe": "a", "maxOffsetsPerTrigger": "5"}, False, "not supported in batch"),
        ({"subscribe": "a", "startingOffsets": "latest"}, False, "can't be latest"),
        ({"subscribe": "a", "startingOffsets": '{"a":{"0":-1}}'}, False, "can't be latest"),
        ({"subscribe": "a", "endingOffsets": "earliest"}, False, "can't be earliest"),
        ({"subscribe": "a", "startingOffsets": "soon"}, True, "must be 'earliest', 'latest' or JSON"),
        ({"subscribe": "a", "startingOffsets": '{"a":{"0":-3}}'}, True, "-3 cannot be"),
        ({"subscribe": "a", "startingOffsets": "{"}, True, "must be JSON"),
        ({"assign": "[1]"}, True, "must be JSON"),
        ({"subscribe": "a", "startingTimestamp": "yesterday"}, True, "milliseconds"),
        ({"subscribe": "a", "minPartitions": "0"}, True, "positive"),
        ({"subscribe": "a", "includeHeaders": "yes"}, True, "true, false"),
        ({"subscribe": "a", "onDataLoss": "skip", "failOnDataLoss": "true"}, True, "say the same thing"),
        ({"subscribe": "a", "onDataLoss": "cry"}, True, "fail, skip, report"),
        (
            {"subscribe": "a", "minOffsetsPerTrigger": "9", "maxOffsetsPerTrigger": "5"},
            True,
            "less than or equal",
        ),
        ({"subscribe": "a", "maxTriggerDelay": "soon"}, True, "15m"),
        ({"subscribe": "a", "kafka.auto.offset.reset": "earliest"}, True, "'startingOffsets'"),
        ({"subscribe": "a", "kafka.value.deserializer": "x"}, True, "byte arrays"),
    ],
)
def test_what_cannot_be_is_refused_in_words(options: dict[str, str], streaming: bool, words: str) -> None:
    assert words in refused(options, streaming=streaming)


def test_bootstrap_servers_must_be_there() -> None:
    with pytest.raises(OptionError, match=r"kafka\.bootstrap\.servers"):
        parse_source_options({"subscribe": "a"}, streaming=True)


def test_names_of_options_have_no_case() -> None:
    options = parse_source_options({**BASE, "SUBSCRIBE": "a", "STARTINGOFFSETS": "Earliest"}, streaming=True)
    assert options.starting == "earliest"


def test_tuning_of_group_membership_is_left_out_because_there_is_none() -> None:
    options = parse_source_options(
        {**BASE, "subscribe": "a", "kafka.session.timeout.ms": "1", "kafka.group.id": "g"}, streaming=True
    )
    assert options.consumer == {"bootstrap.servers": "h:9092"}
    assert options.progress_group == "g"


@pytest.mark.parametrize(
    ("text", "ms"), [("500ms", 500), ("30s", 30_000), ("15m", 900_000), ("2 h", 7_200_000), ("7", 7)]
)
def test_durations_are_read_as_spark_writes_them(text: str, ms: int) -> None:
    assert parse_duration_ms("maxTriggerDelay", text) == ms

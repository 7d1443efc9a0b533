"""Speed and size of a broker, measured with foreign clients, side by side with real Kafka where one can be started.

`python -m benchmarks` runs everything (`make bench` is the same). `systems` starts and ends the brokers, `workloads`
measures one thing each, `report` makes the table and the chart. Nothing here is a test: numbers depend on the machine,
so they are measured, compared within one run, and written down with machine and date.
"""

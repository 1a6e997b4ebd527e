"""The engine over HTTP: OpenAI's API, limits, metrics.

`app` puts the rooms together. A request comes in through `guard` (keys, bodies), is read by the
schemas, becomes an `Exchange` with the engine, and leaves as JSON or as a stream of events.
"""

"""The engine over HTTP: OpenAI's API, limits, metrics, and the memory page.

`lifecycle` runs it, `app` puts the endpoints together. A request comes in through `connections`
and `guard`, is read by the schemas, becomes an `Exchange` with the engine, and leaves as JSON or as
an `EventStream`. `Serving` is the one object that owns the engine: endpoints ask it for exchanges,
and whoever watches the memory asks it for a look between two steps.
"""

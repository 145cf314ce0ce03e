"""The simulated provider: a real HTTP/1.1 server with a durable ledger that fails on request.

Stripe-like as far as durable effects need it. Nothing else of `app` is imported here, and nothing
of `app` imports from here except the command line: Fencepost's own adapter talks to it over HTTP
like to any provider.

| module | what it holds |
|---|---|
| `command` | the command line: `run`, `main`, ready line, exit statuses |
| `server` | `serve`: sockets, connection limit, clean stop |
| `connection` | one connection: h11, size limits, cuts by FIN or RST |
| `application` | which part answers a path; Request-Id |
| `routes`, `bodies` | provider requests read and checked |
| `provider` | the order of things in one call: rules, keys, tokens, ledger |
| `execution`, `objects` | what an executed call does, and the objects it answers |
| `tokens` | the test tokens and where each request carries them |
| `faults` | faults, and the rules armed by tests |
| `control` | the control interface under `/_control` |
| `ledger` | effects, stored answers, strikes and settings, in SQLite |
| `state`, `wire` | what one running simulator is made of; requests and answers |
"""

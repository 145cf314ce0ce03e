"""Provider adapters: one file per provider, each holding one constant, `provider` (a `ProviderPlugin`).

| module | what it holds |
|---|---|
| `http` | the one HTTP transport for effects: last check, one send, one outcome for whatever happens |
| `http_slots` | the connections behind it, one per call under way |
| `retry_after` | the one parser of `Retry-After` |
| `payments` | the simulated payment provider; `payments_answers` reads what it says |
| `simulator` | that provider itself, a server of its own; nothing here imports it |

Modules without the constant are no plug-ins, and packages are not looked into (`app.bootstrap`).
"""

"""`fencepost up`: everything in one, for trying and for development.

One parent (`command`) starts PostgreSQL, the simulated provider, the API, workers and a reconciler, each a
process of its own, and stops them in the opposite order. A child's standard streams go to a log file; each
lives in a session of its own, so that a terminal's Ctrl-C reaches the parent alone; each ends by itself soon
after the parent died, however that died (`child`). The embedded PostgreSQL may live on: the next start on the
same folder adopts it.
"""

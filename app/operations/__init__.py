"""Operation types: one pure file per type, each holding one constant, `operation_type`.

A module without that constant is no type (`payments_api`: how requests to the payment provider look). Nothing
here does I/O or looks at a clock; bootstrap collects the constants and checks them against the providers.
"""

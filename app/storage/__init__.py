"""All SQL. One function is one verb over a batch; SQLAlchemy Core spells it, psycopg runs it."""

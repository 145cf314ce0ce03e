"""The only room that serves HTTP: words of requests in, words of answers out, rules elsewhere."""

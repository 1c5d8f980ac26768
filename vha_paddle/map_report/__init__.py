"""A run's maps looked at from outside: tables and figures from its checkpoint and its metrics. Needs no Paddle."""

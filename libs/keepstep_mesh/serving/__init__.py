"""Run a service: listen, route, parse bodies, describe itself, end."""

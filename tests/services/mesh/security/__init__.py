"""Tokens, certificates, and web pages: what a service grants, and to which client."""

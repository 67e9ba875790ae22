"""Bridges to other frameworks, each imported only when it is asked for."""

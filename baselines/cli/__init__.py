"""One module a command; see `agentgym.baselines.commands`."""

"""`python -m agentgym`: the command line."""

from agentgym.cli import main

main()

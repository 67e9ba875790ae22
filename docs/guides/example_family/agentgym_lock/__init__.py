"""An example family for agentgym: combination locks. Importing the package registers nothing; its card does."""

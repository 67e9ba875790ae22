"""ALFWorld: household text games in the rules and the exact wording of the reference engine.

`pddl` reads problem files, `wording` recognises a game's text grammar, `game` compiles both into an immutable
`Game`, `engine` plays it, and `textworld_backend` plays the same game with the reference packages themselves.
"""

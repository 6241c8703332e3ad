"""Decision rules choose an option, given the log-probabilities of all options.

A rule is a dataclass with a formula.
"""

"""Decision rules: which option wins, given the log-probabilities of all. A rule is a dataclass with its formula."""

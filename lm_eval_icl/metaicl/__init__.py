"""MetaICL (Min et al., NAACL 2022): its settings, data files, sequences of tokens, and metric."""

"""MetaICL (Min et al., NAACL 2022): its settings, its data files, its sequences of tokens, and its metric."""

"""The runtime type checker of the test suite: beartype as mypy reads types."""

import beartype

# PEP 484: an int is a float wherever a float is asked for.
check = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))

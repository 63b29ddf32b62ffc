"""Which samples step t sees: pure functions of the settings and the data's size, without processes or files."""

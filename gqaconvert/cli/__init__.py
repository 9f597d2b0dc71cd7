"""The command line: parse, call the library, print. The only place that prints, and the only one that exits."""

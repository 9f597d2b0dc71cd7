"""The command line: parse, call the library, print. The only place that prints, and the only one that exits."""

import gc

# Before anything else is imported: modules, and the hundreds of thousands of small objects of an index, all stay. The
# cyclic collector would walk them for a second, again and again.
gc.set_threshold(100_000, 20, 100)

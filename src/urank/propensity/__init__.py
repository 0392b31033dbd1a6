"""How likely an item is looked at, by position: estimates of examination, by which clicks can be weighed."""

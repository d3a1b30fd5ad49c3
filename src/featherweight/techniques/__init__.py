"""One file a technique. See `base.Technique`; the registry that finds them is `recipe`."""

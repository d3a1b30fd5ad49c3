"""How quantisation works, in plain torch: the numbers that every kernel is tested against."""

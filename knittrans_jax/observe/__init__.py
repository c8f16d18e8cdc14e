"""What a run says of itself: the live table, the summary, and the figures behind them."""

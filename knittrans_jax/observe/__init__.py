"""What a run says of itself: the live table, the summary, the report, the trace, the meters, and the figures behind them."""

"""The predictors in use and the file that keeps what one has learned."""

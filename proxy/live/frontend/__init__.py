"""The public listener's application: routes, checks and pass-through."""

"""The store of events, and the views: folds of events for people and programs. Knows neither writers nor surfaces."""

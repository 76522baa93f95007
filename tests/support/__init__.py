"""What several test files share and nothing else needs: engines, models, processes, checks of the C libraries."""

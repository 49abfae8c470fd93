"""Programs that few need, imported where they are used only."""

"""The impression log: columns, reading, preparation, inspection."""

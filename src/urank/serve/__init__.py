"""The server: ranks over HTTP, logs what happened durably, and shows what the model thinks of a list."""

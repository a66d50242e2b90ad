"""Communication over a thin, unreliable link: messages, payloads, transfers, topics, transports."""

"""Lost updates: which small changes a format does not see, what helps, and what does not."""

"""`agentgym study`: methods x cold starts x seeds under one budget, resumable, from small committed summaries."""

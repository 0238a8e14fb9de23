"""Full attention: every token sees all tokens before it."""

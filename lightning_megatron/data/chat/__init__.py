"""Chats as training data: conversations, templates, tokens with loss masks, documents packed into rows."""

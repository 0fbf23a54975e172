"""Data modules: text and chats."""

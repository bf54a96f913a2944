"""An example app: mail is imported from mailboxes by queue tasks, several of which may start at once."""

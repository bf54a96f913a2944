from django.contrib import admin

from .models import SyncRun
from .runs import is_stalled, mark_stalled


@admin.register(SyncRun)
class SyncRunAdmin(admin.ModelAdmin):
    """The runs, and which of them are dead."""

    list_display = ["channel", "state", "alive", "started_at", "ended_at"]
    list_filter = ["state"]
    actions = ["end_stalled"]

    @admin.display(boolean=True, description="alive")
    def alive(self, run: SyncRun) -> bool | None:
        if run.state != SyncRun.State.RUNNING:
            return None
        stalled = is_stalled(run)
        return None if stalled is None else not stalled

    @admin.action(description="Mark the stalled ones as such")
    def end_stalled(self, request, runs):
        self.message_user(request, f"{mark_stalled(runs)} of them had stalled.")

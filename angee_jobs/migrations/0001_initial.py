from django.db import migrations, models


class OnPostgreSQL(migrations.RunSQL):
    """SQL that only PostgreSQL gets; on every other database there is nothing to do."""

    def database_forwards(self, app_label, schema_editor, from_state, to_state):
        if schema_editor.connection.vendor == "postgresql":
            super().database_forwards(app_label, schema_editor, from_state, to_state)

    def database_backwards(self, app_label, schema_editor, from_state, to_state):
        if schema_editor.connection.vendor == "postgresql":
            super().database_backwards(app_label, schema_editor, from_state, to_state)


# Owned by no column, or `manage.py flush` would restart it and fencing tokens would go back. It starts at the present
# in microseconds, so that also one that was dropped and made again goes on above every earlier token. CACHE 1: a cache
# per session would hand out tokens in another order than the grants.
FENCING_SEQUENCE = """
DO $$
BEGIN
    EXECUTE format(
        'CREATE SEQUENCE angee_jobs_fencing_token CACHE 1 START WITH %s',
        floor(extract(epoch FROM clock_timestamp()) * 1000000)::bigint
    );
END
$$
"""

# Half of each page stays free for the next versions of its rows, so that updates stay on their page and need no new
# index entries (HOT). A vacuum of this small table is cheap, and late ones would let it grow to many times its size.
HOT_TABLE = """
ALTER TABLE angee_jobs_tasklock SET (
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_insert_scale_factor = 0.2,
    autovacuum_analyze_scale_factor = 0.2,
    autovacuum_vacuum_cost_delay = 0
)
"""


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="TaskLock",
            fields=[
                (
                    "digest",
                    models.CharField(
                        max_length=64, primary_key=True, serialize=False, verbose_name="digest of the name"
                    ),
                ),
                ("name", models.TextField(verbose_name="name")),
                (
                    "owner",
                    models.CharField(
                        help_text="Empty: nobody holds it.", max_length=64, verbose_name="hash of the owner id"
                    ),
                ),
                (
                    "holder",
                    models.TextField(help_text="Host, process, thread and task, as JSON.", verbose_name="holder"),
                ),
                ("acquired_at", models.DateTimeField(verbose_name="acquired at")),
                (
                    "expires_at",
                    models.DateTimeField(help_text="Of a free lock: when it was released.", verbose_name="expires at"),
                ),
                ("fencing_token", models.BigIntegerField(verbose_name="fencing token")),
                (
                    "waited_until",
                    models.DateTimeField(
                        help_text="A release before this moment tells the waiters.",
                        null=True,
                        verbose_name="waited for until",
                    ),
                ),
            ],
            options={
                "verbose_name": "lock",
                "verbose_name_plural": "locks",
                "permissions": [("release_tasklock", "Can release held locks by force")],
                "default_permissions": ("view",),
            },
        ),
        migrations.CreateModel(
            name="SessionHold",
            fields=[
                (
                    "advisory_key",
                    models.BigIntegerField(primary_key=True, serialize=False, verbose_name="advisory lock key"),
                ),
                ("server_pid", models.IntegerField(verbose_name="server process")),
                ("name", models.TextField(verbose_name="name")),
                ("holder", models.TextField(verbose_name="holder")),
                ("acquired_at", models.DateTimeField(verbose_name="acquired at")),
                ("fencing_token", models.BigIntegerField(verbose_name="fencing token")),
            ],
            options={
                "verbose_name": "session lock",
                "verbose_name_plural": "session locks",
                "default_permissions": ("view",),
            },
        ),
        migrations.CreateModel(
            name="LockGuard",
            fields=[
                (
                    "digest",
                    models.CharField(
                        max_length=64, primary_key=True, serialize=False, verbose_name="digest of the name"
                    ),
                ),
                ("name", models.TextField(verbose_name="name")),
                ("fencing_token", models.BigIntegerField(verbose_name="fencing token")),
                ("passed_at", models.DateTimeField(db_index=True, verbose_name="passed at")),
            ],
            options={
                "verbose_name": "guard",
                "verbose_name_plural": "guards",
                "default_permissions": ("view",),
            },
        ),
        OnPostgreSQL(FENCING_SEQUENCE, reverse_sql="DROP SEQUENCE angee_jobs_fencing_token"),
        OnPostgreSQL(HOT_TABLE, reverse_sql=migrations.RunSQL.noop),
    ]

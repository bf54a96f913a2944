from django.http import HttpResponse
from django.urls import path

from angee_jobs.locks import lock
from shop.models import Order


def order(request):
    with lock("orders") as held:
        Order.objects.create(number=Order.objects.count())
    return HttpResponse(str(held.fencing_token))


urlpatterns = [path("order", order)]

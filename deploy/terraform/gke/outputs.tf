output "island" {
  value       = "gce/${var.region}"
  description = "Island of the nodes, as discovery derives it from their region."
}

output "cluster_name" {
  value = google_container_cluster.this.name
}

output "kubeconfig_command" {
  value = "gcloud container clusters get-credentials ${google_container_cluster.this.name} --region ${var.region} && kubectl config rename-context \"$(kubectl config current-context)\" gke"
}

output "cidrs" {
  value = [var.cidrs.nodes, var.cidrs.pods]
}

output "vpn_address" {
  value = try(google_compute_address.vpn[0].address, null)
}

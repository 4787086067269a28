output "island" {
  value       = "aws/${data.aws_region.this.name}"
  description = "Island of the nodes, as discovery derives it from their region."
}

output "cluster_name" {
  value = aws_eks_cluster.this.name
}

output "kubeconfig_command" {
  value = "aws eks update-kubeconfig --region ${data.aws_region.this.name} --name ${aws_eks_cluster.this.name} --alias eks"
}

output "cidrs" {
  value = [var.cidr]
}

output "vpn" {
  value     = try({ address = aws_vpn_connection.peer[0].tunnel1_address, secret = aws_vpn_connection.peer[0].tunnel1_preshared_key }, null)
  sensitive = true
}
